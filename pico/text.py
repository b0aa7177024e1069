"""Generate English sentences for a speech synthesiser, to train a tiny recogniser.

Real transcripts have a licence and rare words that a small model cannot learn. These sentences are generated from
a grammar: everyday English with about three thousand words. Each word is frequent enough in 200,000 sentences to
be learned. Numbers are spelled out, and the context distinguishes homophones.

    python -m pico.text 20 --seed 0          # print twenty sentences
    python -m pico.text 200000 --stats       # word counts of 200,000 sentences

How the grammar is written
    {name}       any entry of LISTS["name"] or RULES["name"]; an entry may have slots itself
    {a:fruit}    the same, with "a" or "an" before it
    {fruit.pl}   plural of the entry's last word; {uncle.own}: uncle's
    {do.ed}      the entry's first word as a verb: .s .ed .ing .en (takes, took, taking, taken)
    [this|that]  one of the alternatives
LISTS have plain entries, separated by commas if there is a comma, otherwise by spaces. RULES have entries separated
by slashes, SENTENCES one entry per line, VERBS lines of "several verbs: the phrase after them". An entry that occurs
twice is drawn twice as often. The last character of a sentence determines which OPENERS may precede it: "." for a
statement, "?" for a question, "!" for a request or greeting (spoken as ".").
"""

from __future__ import annotations

import argparse
import random
import re
import time
import zlib
from collections import Counter
from functools import cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

MAX_WORDS = 25
HELD_OUT_SHARE = 40  # one sentence in this many belongs to the benchmark

LISTS: dict[str, str] = {
    # -- people ----------------------------------------------------------------------------------------
    "woman": """
        Emma Olivia Ava Sophia Isabella Charlotte Amelia Harper Evelyn Abigail Emily Elizabeth Camila Luna
        Avery Mila Scarlett Penelope Layla Chloe Victoria Eleanor Grace Nora Riley Zoe Hannah Hazel Lily
        Lillian Lucy Paisley Natalie Naomi Alice Audrey Claire Stella Caroline Samantha Maya Ruby Sarah
        Julia Maria Rachel Rebecca Katherine Jessica Jennifer Linda Patricia Barbara Susan Karen Nancy
        Margaret Sandra Ashley Kimberly Donna Michelle Dorothy Amanda Melissa Deborah Stephanie Sharon
        Laura Cynthia Kathleen Amy Angela Anna Brenda Pamela Nicole Helen Christine Janet Diane Virginia
        Teresa Heather Gloria Judith Megan Martha Andrea Cheryl Jacqueline Marie Ruth Vanessa Tiffany
        Monica Fatima Priya Ingrid Greta Daisy Bridget Miranda Veronica Beatrice Florence""",
    "man": """
        Liam Noah Oliver James Elijah William Henry Lucas Benjamin Theodore Sebastian Daniel Jack Michael
        Alexander Owen Samuel Matthew Joseph David Wyatt Julian Leo Isaac Anthony Thomas Charles
        Christopher Joshua Andrew Nathan Ryan Adrian Aaron Robert Jonathan Nolan Dominic Jordan Adam Ian
        Gabriel Vincent Victor George Kevin Edward Brian Timothy Ronald Jason Jeffrey Gary Nicholas Eric
        Stephen Larry Justin Scott Brandon Frank Gregory Raymond Patrick Dennis Jerry Tyler Walter Peter
        Harold Douglas Arthur Roger Keith Carl Lawrence Albert Bruce Ralph Eugene Russell Bobby Philip
        Johnny Logan Mason Ethan Luke Simon Oscar Felix Hugo Omar Ahmed Carlos Diego Pablo Rafael Hassan
        Ivan Leonard Martin Hector Marcus Max Toby Kyle Derek Craig Trevor Curtis Elliot""",
    "surname": """
        Smith Johnson Williams Brown Jones Garcia Miller Davis Rodriguez Martinez Hernandez Lopez Gonzalez
        Wilson Anderson Taylor Jackson Thompson White Harris Sanchez Ramirez Robinson Walker Young Allen
        Torres Hill Green Adams Nelson Baker Rivera Campbell Mitchell Carter Roberts Gomez Evans Turner
        Diaz Parker Edwards Collins Stewart Morris Morales Murphy Rogers Gutierrez Ortiz Morgan Cooper
        Peterson Bailey Kelly Howard Ramos Kim Ward Richardson Watson Brooks Chavez Bennett Mendoza Ruiz
        Hughes Alvarez Castillo Sanders Patel Myers Ross Foster Jimenez Powell Jenkins Perry Butler Barnes
        Fisher Henderson Coleman Simmons Patterson Reynolds Hamilton Graham Griffin Wallace Bryant Gibson
        Ellis Stevens Murray Ford Marshall Owens McDonald Harrison Kennedy Wells Freeman Tucker Burns
        Crawford Porter Hunter Silva Robertson Palmer""",
    "title": "Doctor Doctor Professor Captain Judge Coach Nurse Officer Senator Miss",
    "female_relative": "mother, sister, aunt, niece, grandmother, wife, daughter, girlfriend, sister",
    "male_relative": "father, brother, uncle, nephew, grandfather, husband, grandson, boyfriend, brother",
    "family": "mother father sister brother aunt uncle grandmother grandfather wife husband",
    "acquaintance": """
        cousin, neighbor, friend, best friend, roommate, colleague, boss, classmate, partner, assistant""",
    "profession": """
        doctor nurse teacher lawyer engineer plumber electrician carpenter mechanic baker butcher chef
        waiter waitress cashier barber hairdresser dentist surgeon pharmacist farmer gardener pilot driver
        soldier officer detective firefighter judge journalist reporter editor author painter sculptor
        musician singer dancer actor director photographer architect scientist chemist programmer
        accountant manager secretary receptionist librarian professor coach referee athlete translator
        cleaner janitor builder clerk designer analyst consultant therapist psychologist tutor landlord
        neighbor customer tourist""",
    "office_job": "designer engineer manager analyst programmer accountant secretary assistant translator",
    "workers": """
        doctors nurses teachers lawyers engineers farmers drivers soldiers firefighters journalists
        scientists athletes workers customers tourists visitors volunteers managers musicians actors""",
    "kin_plural": "parents children grandparents friends neighbors cousins colleagues students twins kids",
    "person_adj": """
        friendly kind polite rude clever brave shy honest generous lazy quiet funny serious patient
        stubborn gentle helpful clumsy talented ambitious cheerful strict humble charming loyal creative
        careful intelligent curious selfish young famous tall""",
    "emotion": """
        happy sad angry tired nervous excited proud worried lonely surprised disappointed grateful jealous
        embarrassed confused calm anxious curious hungry thirsty sleepy confident relaxed frustrated upset
        hopeful delighted annoyed scared homesick exhausted""",
    "body": """
        head neck shoulder arm elbow wrist hand finger thumb back stomach hip leg knee ankle foot ear jaw
        chest""",
    "illness": """
        headache, fever, cough, cold, sore throat, stomachache, toothache, allergy, rash, infection,
        bruise, migraine, virus""",
    "medicine": "pill tablet medicine ointment vitamin syrup vaccine aspirin antibiotic",
    # -- places ----------------------------------------------------------------------------------------
    "city": """
        London, Paris, Berlin, Madrid, Rome, Vienna, Prague, Dublin, Lisbon, Athens, Oslo, Stockholm,
        Helsinki, Copenhagen, Amsterdam, Brussels, Zurich, Geneva, Milan, Venice, Florence, Naples,
        Barcelona, Seville, Valencia, Munich, Hamburg, Frankfurt, Cologne, Dresden, Warsaw, Krakow,
        Budapest, Bucharest, Belgrade, Zagreb, Istanbul, Ankara, Moscow, Tokyo, Osaka, Kyoto, Beijing,
        Shanghai, Bangkok, Hanoi, Manila, Jakarta, Singapore, Mumbai, Chennai, Karachi, Lahore, Dubai,
        Cairo, Nairobi, Lagos, Accra, Casablanca, Johannesburg, Sydney, Melbourne, Brisbane, Perth,
        Auckland, Wellington, Toronto, Montreal, Vancouver, Ottawa, Calgary, Quebec, Boston, Chicago,
        Houston, Phoenix, Philadelphia, Dallas, Austin, Denver, Seattle, Portland, Detroit, Memphis,
        Nashville, Baltimore, Milwaukee, Atlanta, Miami, Tampa, Orlando, Cleveland, Pittsburgh,
        Cincinnati, Minneapolis, Omaha, Tulsa, Tucson, Albuquerque, Sacramento, Oakland, Honolulu,
        Anchorage, Charleston, Savannah, Buffalo, Rochester, Albany, Hartford, Providence, Richmond,
        Norfolk, Lexington, Louisville, Indianapolis, Columbus, Toledo, Madison, Lincoln, Boise, Spokane,
        Reno, Havana, Lima, Bogota, Santiago, Quito, Caracas, Manchester, Liverpool, Birmingham, Leeds,
        Bristol, Oxford, Cambridge, Glasgow, Edinburgh, Cardiff, Belfast, Brighton, Nottingham, Sheffield,
        New York, Los Angeles, San Francisco, San Diego, Las Vegas, New Orleans, Salt Lake City, Kansas
        City, Mexico City, Cape Town, Hong Kong, Buenos Aires, Saint Louis, San Antonio, Santa Fe""",
    "region": """
        France, Germany, Italy, Spain, Portugal, Greece, Turkey, Egypt, Morocco, Kenya, Ghana, Nigeria,
        Ethiopia, Tanzania, Uganda, Senegal, Tunisia, Algeria, Israel, Jordan, Lebanon, India, Pakistan,
        Nepal, China, Japan, Korea, Vietnam, Thailand, Malaysia, Indonesia, Cambodia, Australia, Canada,
        Mexico, Guatemala, Panama, Colombia, Ecuador, Peru, Bolivia, Argentina, Brazil, Uruguay, Paraguay,
        Cuba, Jamaica, Haiti, Ireland, Scotland, Wales, England, Norway, Sweden, Finland, Denmark,
        Iceland, Poland, Ukraine, Hungary, Austria, Switzerland, Belgium, Croatia, Serbia, Bulgaria,
        Romania, Estonia, Latvia, Lithuania, Cyprus, Malta, Mongolia, Bangladesh, New Zealand, Costa Rica,
        South Africa, Sri Lanka, Texas, California, Florida, Ohio, Michigan, Virginia, Alabama, Kentucky,
        Tennessee, Oregon, Nevada, Arizona, Utah, Colorado, Montana, Wyoming, Nebraska, Iowa, Minnesota,
        Wisconsin, Illinois, Missouri, Arkansas, Louisiana, Mississippi, Oklahoma, Alaska, Hawaii,
        Vermont, Maryland, Delaware, Pennsylvania, Massachusetts, Connecticut""",
    "language": """
        English French Spanish German Italian Japanese Chinese Arabic Russian Portuguese Korean Turkish
        Greek Polish Dutch Swedish Hindi""",
    "building": """
        library, museum, hospital, school, station, airport, hotel, restaurant, bakery, pharmacy,
        supermarket, bank, church, temple, mosque, theater, cinema, stadium, gym, park, post office,
        police station, town hall, university, castle, factory, warehouse, gallery, zoo, aquarium, market,
        cafe, embassy, courthouse, harbor, lighthouse, playground, cathedral, palace, tower, bookstore""",
    "buildings": "museums hotels restaurants bridges castles churches gardens markets palaces towers parks",
    "room": """
        kitchen, bathroom, bedroom, living room, dining room, basement, attic, hallway, garage, office,
        laundry room, nursery""",
    "nature": """
        river lake mountain forest beach island valley desert ocean waterfall cave meadow volcano canyon
        jungle swamp field coast""",
    "street_name": """
        Maple Oak Cedar Pine Elm Willow Chestnut Park Church Mill Bridge Station Market Garden Highland
        River Lake Forest Orchard Sunset Washington Franklin Queen Prince Spring""",
    "street_kind": "Street Street Avenue Lane Drive Boulevard Square",
    "office_room": "conference room, meeting room, cafeteria, lobby, parking lot, elevator",
    # -- things ----------------------------------------------------------------------------------------
    "fruit": """
        apple banana orange lemon lime mango peach plum cherry grape pineapple strawberry raspberry kiwi
        coconut watermelon fig avocado""",
    "vegetable": """
        carrot potato tomato onion cucumber pepper cabbage mushroom radish turnip pumpkin artichoke
        eggplant zucchini""",
    "meat": "beef pork chicken turkey ham bacon salmon tuna shrimp lamb",
    "grocery": """
        bread, butter, milk, cheese, rice, pasta, yogurt, honey, jam, sugar, salt, flour, oatmeal, cereal,
        ham, bacon, chicken, beef, pork, turkey, salmon, tuna, olive oil, vinegar, mustard, ketchup,
        mayonnaise, cinnamon, vanilla, basil, parsley, chocolate, coffee, tea, juice, tofu, spinach,
        broccoli, lettuce, celery, garlic, ginger, corn, peanut butter, maple syrup, ice cream""",
    "dish": """
        sandwich, burger, pizza, salad, omelet, burrito, taco, pancake, waffle, muffin, croissant, bagel,
        cookie, brownie, cupcake, pretzel, donut, curry, stew, casserole, hot dog, dumpling, kebab,
        lasagna, meatball, vegetable soup, chicken soup, tomato soup, cheese omelet, fruit salad""",
    "pastry": """
        cake, pie, muffin, brownie, cupcake, cookie, croissant, apple pie, chocolate cake, pumpkin pie,
        birthday cake, wedding cake""",
    "drink": """
        coffee, green tea, hot chocolate, orange juice, lemonade, sparkling water, iced tea, apple juice,
        red wine, white wine, cider, soda, tomato juice, cold water, mint tea, beer""",
    "cafe_drink": "coffee espresso cappuccino latte milkshake smoothie cocktail lemonade tea",
    "taste": "delicious fresh spicy sweet sour salty bitter tasty crispy creamy strange",
    "food_adj": "delicious fresh spicy tasty crispy creamy homemade frozen organic",
    "animal": """
        dog cat horse cow pig sheep goat chicken duck goose turkey rabbit mouse hamster parrot canary fox
        wolf bear squirrel whale dolphin shark tiger lion leopard elephant giraffe zebra monkey gorilla
        kangaroo panda camel penguin eagle owl turtle lizard snake frog crocodile spider butterfly donkey""",
    "animals": """
        dogs cats horses cows pigs sheep goats chickens ducks geese rabbits mice wolves bears dolphins
        sharks tigers lions elephants monkeys penguins turtles snakes spiders butterflies birds insects""",
    "pet": "dog cat puppy kitten rabbit pony hamster parrot goldfish turtle",
    "clothes": """
        shirt jacket coat sweater scarf hat cap glove boot shoe sock belt dress skirt blouse suit tie
        uniform raincoat vest sandal backpack umbrella""",
    "tool": """
        hammer screwdriver wrench drill saw ladder shovel bucket rope paintbrush chisel flashlight broom
        mop toolbox hose""",
    "furniture": """
        table chair sofa couch desk bed bookshelf wardrobe dresser lamp mirror rug carpet curtain cushion
        pillow mattress armchair cabinet bench stool""",
    "surface": "table chair sofa couch desk bed bookshelf dresser cabinet bench stool rug carpet",
    "furnishings": "chairs tables lamps beds desks mirrors curtains cushions pillows rugs",
    "dishware": "plate bowl cup glass fork knife spoon pan pot kettle tray pitcher teapot mug",
    "device": """
        phone laptop computer tablet printer camera keyboard monitor speaker radio television charger
        battery router scanner projector microphone oven stove refrigerator freezer toaster blender
        microwave dishwasher heater fan doorbell""",
    "car": "car truck van bicycle motorcycle scooter minivan taxi tractor",
    "vehicle": "car bus train taxi truck van bicycle motorcycle boat ferry helicopter subway ambulance",
    "vehicles": "cars buses trucks motorcycles taxis",
    "toy": "doll kite puzzle balloon robot drum whistle trampoline",
    "gift": """
        necklace, bracelet, ring, watch, wallet, bouquet, card, candle, teddy bear, board game, picture
        frame, vase, purse, notebook, diary, basket, poster, perfume bottle""",
    "stationery": """
        pencil pen ruler eraser stapler envelope notebook textbook calculator folder calendar stamp""",
    "cloth": "wool cotton silk leather velvet denim linen nylon",
    "material": "plastic steel iron copper silver gold glass stone bamboo rubber marble paper",
    "color": """
        red blue green yellow orange purple pink brown black white gray silver golden turquoise beige
        crimson violet navy maroon""",
    "object_adj": """
        big small large tiny huge old new modern ancient heavy light cheap expensive beautiful ugly broken
        clean dirty empty soft hard smooth rough round square narrow long short thin thick bright dark
        shiny dusty rusty wooden colorful elegant simple comfortable strange ordinary fragile sturdy
        portable sharp useful wet""",
    "place_feel": "old modern beautiful quiet crowded noisy peaceful famous dark popular elegant",
    "place_adj": """
        old new modern ancient beautiful quiet crowded noisy peaceful enormous famous empty tiny abandoned
        historic popular local elegant dark haunted public private narrow""",
    "event_adj": """
        boring interesting exciting amazing terrible wonderful difficult important dangerous impossible
        strange perfect awful fantastic brilliant ridiculous unusual lovely complicated incredible
        disappointing relaxing stressful memorable""",
    "flower": "rose tulip daisy orchid sunflower violet cactus carnation",
    "tree": "oak pine maple willow cedar",
    "container": "bag box bottle can jar",
    "paper": """
        report, contract, invoice, presentation, proposal, spreadsheet, document, agenda, survey,
        brochure, newsletter, budget, application, letter, manual, summary, essay, draft, article, memo""",
    "meeting": """
        meeting, interview, conference, training, workshop, appointment, phone call, seminar, lunch
        meeting, video call, ceremony, rehearsal""",
    "event": """
        wedding, concert, birthday party, festival, exhibition, parade, graduation, picnic, barbecue,
        dinner party, play, carnival, reunion, auction, game, tournament, marathon, fireworks show, book
        club, funeral, lecture, competition""",
    "project": """
        project, website, campaign, strategy, database, product launch, security system, customer survey,
        research project, new design, new catalog, training program""",
    "department": "marketing sales finance legal engineering support research accounting design security",
    "subject": """
        history geography biology chemistry physics mathematics literature music art economics philosophy
        psychology algebra geometry astronomy grammar politics""",
    "event_adj_long": """
        boring interesting exciting difficult important dangerous unusual complicated disappointing
        relaxing stressful""",
    "school_test": "exam quiz test homework lesson project",
    "assignment": "exam, essay, quiz, lesson, lecture, test, spelling test",
    "hobby": """
        painting gardening knitting photography hiking fishing cycling dancing swimming surfing climbing
        baking camping skating yoga sailing karate pottery chess skiing reading running boxing""",
    "sport": """
        football basketball baseball tennis hockey volleyball golf rugby cricket badminton soccer chess""",
    "instrument": "piano guitar violin cello flute trumpet saxophone harp clarinet ukulele",
    "music": """
        jazz, rock, classical music, pop music, folk songs, blues, hip hop, reggae, country music, opera,
        piano music, dance music, heavy metal, folk music""",
    "song_adj": "slow sad cheerful quiet loud popular relaxing famous",
    "genre": "comedy drama documentary thriller romance western cartoon mystery musical tragedy fantasy",
    "media": "song movie video podcast episode playlist album recording audiobook trailer",
    "file": "file, photo, video, folder, document, password, picture, attachment, backup, program, song",
    "cafe_drinks": "coffees teas espressos cocktails milkshakes smoothies lemonades",
    "smart_device": """
        lights, heating, alarm, fan, air conditioner, oven, music, television, radio, security camera""",
    "team": """
        Tigers Lions Eagles Bears Sharks Giants Rangers Pirates Wolves Hawks Dragons Warriors Panthers
        Falcons Rockets""",
    "topic": """
        weather election economy traffic budget accident schedule vacation wedding neighborhood interview
        apartment""",
    "news_noun": """
        economy education housing health transportation agriculture energy tourism trade immigration
        unemployment inflation pollution safety technology""",
    "official": """
        government president mayor minister senate parliament council committee police court company union
        governor treasury agency commission spokesperson""",
    "leader": "government president minister parliament governor",
    "disaster": "storm flood earthquake hurricane blizzard tornado wildfire drought landslide avalanche",
    "weather_adj": """
        sunny cloudy rainy windy foggy snowy stormy humid chilly warm freezing mild damp icy breezy dry
        hot cold cool""",
    "weather_noun": """
        rain, snow, thunder, lightning, fog, wind, sunshine, drizzle, frost, heavy rain, light snow,
        strong wind, a heat wave, a thunderstorm, a breeze""",
    "season": "spring summer autumn winter",
    "weekday": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "month": "January February March April May June July August September October November December",
    "meal": "breakfast lunch dinner supper dessert brunch",
    "manner": """
        quickly slowly carefully quietly loudly happily suddenly politely nervously gently patiently
        eagerly calmly secretly accidentally immediately finally easily proudly reluctantly""",
    "freq": "always usually often sometimes rarely never occasionally frequently",
    "degree": "very really quite extremely pretty fairly incredibly rather surprisingly",
    "public_vehicle": "train bus ferry subway tram plane taxi",
    "shop": "supermarket bakery pharmacy bookstore market",
    "organ": "heart, skin, brain, health, stomach, lungs, bones, teeth, liver",
    "medical": "doctor nurse dentist surgeon pharmacist therapist psychologist",
    "direction": "north south east west",
    "contest": "game match tournament championship final",
    "bill": "electricity water gas phone hotel hospital",
    # -- numbers ---------------------------------------------------------------------------------------
    "digit": "zero one two three four five six seven eight nine",
    "unit": "one two three four five six seven eight nine",
    "few": "two three four five six seven eight nine ten eleven twelve",
    "teen": "thirteen fourteen fifteen sixteen seventeen eighteen nineteen",
    "tens": "twenty thirty forty fifty sixty seventy eighty ninety",
    "hour": "one two three four five six seven eight nine ten eleven twelve",
    "ordinal": """
        first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth
        fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth""",
    "code_word": "alpha bravo delta echo foxtrot kilo papa romeo sierra tango whiskey yankee zulu",
    "length": "feet meters",
    "distance": "miles kilometers",
}

RULES: dict[str, str] = {
    # -- numbers, times, dates, prices -----------------------------------------------------------------
    "number": "{few} / {few} / {teen} / {tens} / {tens} {unit} / {tens} {unit}",
    "big_number": """
        [a|{unit}] hundred / [a|{unit}] hundred and {number} / {unit} hundred and {tens} {unit} /
        [a|{few}|{tens}] thousand / {few} thousand {unit} hundred / {tens} {unit} thousand / {number}
        million / {unit} hundred thousand""",
    "price": """
        {number} dollars / {number} dollars / {number} [dollars|euros|pounds] / {number} dollars and
        {number} cents / {few} ninety nine / {unit} hundred dollars / {unit} hundred and {number} dollars
        / [a|{few}] thousand dollars""",
    "money": """
        {number} [million|billion] [dollars|euros|pounds] / {unit} hundred [million|thousand] dollars /
        {price}""",
    "clock": """
        {hour} o'clock / {hour} o'clock / half past {hour} / half past {hour} / a quarter past {hour} /
        quarter to {hour} / {hour} [fifteen|thirty|forty five|twenty|fifty] / [five|ten|twenty] [past|to]
        {hour} / {hour} in the morning / [six|seven|eight|nine] in the evening /
        [one|two|three|four|five] in the afternoon / noon / midnight""",
    "day_number": "{ordinal} / {ordinal} / twenty [first|second|third|fourth|fifth|sixth|seventh|eighth]",
    "date": """
        the {day_number} of {month} / the {day_number} of {month} / {month} {day_number} / {month} the
        {day_number} / {weekday}, the {day_number} of {month} / {weekday}, {month} {day_number} / the
        [twenty ninth|thirtieth] of [June|April|August] / the thirty first of
        [January|May|July|October|March|December]""",
    "year": """
        nineteen {tens} {unit} / nineteen {tens} / two thousand and {few} / twenty {teen} / twenty twenty
        [one|two|three|four|five]""",
    "duration": """
        {number} minutes / [an hour|half an hour|an hour and a half|a minute] / {number} hours / {few}
        days / {few} weeks / {few} months / {few} years / [a few|several]
        [seconds|minutes|hours|days|weeks] / [the whole morning|the entire weekend|a long time|the whole
        afternoon]""",
    "past": """
        [yesterday|last night|this morning|last week|last month|last year|earlier today|the other day] /
        [yesterday|last night|this morning|recently|yesterday afternoon|over the weekend] / last {weekday}
        / on {weekday} [morning|afternoon|evening] / {few} [days|weeks|months|years|hours] ago / {tens}
        minutes ago / [ten|twenty|thirty] years ago / in {month} / last {season} / during the {event} /
        after {meal} / at {clock} / in {year} / on {date}""",
    "next": """
        [tomorrow|tonight|next week|this weekend|next month|soon|right away|later today|tomorrow morning]
        / [tomorrow|tonight|this evening|as soon as possible|sometime this week|the day after tomorrow] /
        on {weekday} / next {weekday} / on {weekday} [morning|afternoon|evening] / on {date} / before
        {clock} / at {clock} / after {meal} / before {meal} / in {few} [minutes|hours|days] / in {tens}
        minutes / after the {event} / before the {meeting} / in {month} / next {season}""",
    "lately": "today / now / right now / again / this {season} / this week",
    "now": """
        [right now|at the moment|today|again|as we speak|this week|these days] / [right now|at the
        moment|today|again|still] / this [morning|afternoon|evening|week] / in the {room} / at the
        {building} / with {person} / for the {event}""",
    "phone_number": """
        {digit} {digit} {digit}, {digit} {digit} {digit} {digit} / {digit} {digit} {digit}, {digit}
        {digit} {digit}, {digit} {digit} {digit} {digit} / {digit} {digit} {digit}, double {digit},
        {digit} {digit}""",
    "reference": """
        {code_word} {digit} {digit} {digit} / {code_word} {code_word} {digit} {digit} / {digit} {digit}
        {digit} {code_word} / {digit} {digit} {digit} {digit} / {code_word} {digit} {code_word} {digit} /
        {digit} {digit}, {code_word}, {digit} {digit} / {code_word} {number}""",
    "temperature": "{few} degrees / {tens} degrees / {tens} {unit} degrees / minus {few} degrees",
    "percent": """
        {number} percent / {number} percent / {few} point {digit} percent / [half|a third|a
        quarter|most|one in {few}]""",
    # -- people ----------------------------------------------------------------------------------------
    "name": "{woman} / {man}",
    "relative": "{female_relative} / {male_relative} / {acquaintance}",
    "person": """
        {name} / {name} / {name} / {name} {surname} / {title} {surname} / my {relative} / {kin} / the
        {profession}""",
    "kin": "my {female_relative} {woman} / my {male_relative} {man}",
    "people": """
        {name} and {name} / {name} and {name} / {name} and I / the {workers} / my {kin_plural} / the
        {surname} family and {name} / my {relative} and {name}""",
    "anyone": "{person} / {person} / {person} / {people} / [I|we|they|he|she] / [I|we|they|he|she]",
    "she_tail": """
        lost her {object} in the {room} / hurt her {body} while {hobby} / sold her {car} for {price} /
        wore her {color} {clothes} to the {event} / showed us her {adj_object} {past} / moved to {place}
        with her {relative} / left her {clothes} at the {building} / forgot her {object} again / changed
        her mind about the {event} / gave her {relative} {a:gift} / called her {relative} from {city}""",
    "he_tail": """
        lost his {object} in the {room} / hurt his {body} while {hobby} / sold his {car} for {price} /
        wore his {color} {clothes} to the {event} / showed us his {adj_object} {past} / moved to {place}
        with his {relative} / left his {clothes} at the {building} / forgot his {object} again / changed
        his mind about the {event} / gave his {relative} {a:gift} / called his {relative} from {city}""",
    "mishap": """
        {woman} {she_tail} / {man} {he_tail} / my {female_relative} {she_tail} / my {male_relative}
        {he_tail}""",
    # -- things and places -----------------------------------------------------------------------------
    "object": """
        {tool} / {tool} / {clothes} / {clothes} / {device} / {device} / {gift} / {stationery} /
        {furniture} / {furniture} / {dishware} / {toy}""",
    "objects": """
        {clothes.pl} / {clothes.pl} / {dishware.pl} / {stationery.pl} / {furnishings} / {furnishings} /
        {stationery.pl}""",
    "adj_object": """
        {object_adj} {object} / {object_adj} {color} {object} / {color} {object} / {cloth} {clothes} /
        [plastic|steel|glass|stone|bamboo|wooden|marble] {furniture}""",
    "det": "the / the / the / my / our / that / this",
    "place": "{city} / {region}",
    "where": """
        at the {building} / in the {room} / near the {building} / [at home|at
        work|outside|downstairs|upstairs] / [at home|at work|outside|downstairs|upstairs] / in {city} /
        behind the {building} / next to the {furniture} / in the {office_room} / under the {surface}""",
    "word": "{animal} / {object} / {emotion} / [hello|goodbye] / [hello|goodbye] / [please|thank you]",
    "street": "{street_name} {street_kind}",
    "team_name": "the {city} {team} / the {team}",
    # -- longer pieces ---------------------------------------------------------------------------------
    "routine": """
        wake up at {clock} / go to [bed|work|school] at {clock} / brush my teeth / read the newspaper /
        drink {a:cafe_drink} with {meal} / take a shower / listen to {music} / cook {meal} / work from
        home / go [hiking|swimming|running|shopping|cycling|dancing] / call my {relative} / watch
        television / eat at the {building}""",
    "habit": """
        wake up at {clock} / go to [bed|work|school] at {clock} / read the newspaper / drink
        {a:cafe_drink} with {meal} / take the {public_vehicle} to work / listen to {music} / cook {meal} /
        work from home / play {sport} on {weekday} / watch {a:genre} before bed / walk to the {building} /
        live near the {building} / enjoy {hobby} / speak {language} at home / eat {fruit.pl} for {meal} /
        teach {subject} at the {building} / drive {a:color} {car} / sing in the shower / buy {grocery} on
        {weekday} / sleep until {clock} / complain about the {topic} / wear {a:color} {clothes} / arrive
        late / leave the office at {clock} / play the {instrument} after {meal} / visit {place} every
        {season} / run {few} [miles|kilometers] / talk about {subject} / forget the password / lose the
        keys / clean the {room} on {weekday} / study at the [library|university|cafe]""",
    "reason": """
        it's [raining|snowing|too expensive] / it's [raining|snowing|too far] / the {building} is
        [closed|full|too far away] / {person} is {emotion} / I'm {degree} {emotion} / the {device} is
        broken / there's no {grocery} / we have guests {next} / {person} has {a:illness} / the {vehicle}
        [broke down|is late|was full|won't start] / {person} told me to / it's my {family.own} birthday /
        nobody else [can|will|wants to] / tomorrow is a holiday""",
    "reason_past": """
        it was [raining|snowing|late|cheap|broken|on sale|too loud|dark] / the {building} was
        [closed|full|crowded|too noisy] / {person} was {emotion} / I was {degree} {emotion} / {person} had
        {a:illness} / the {vehicle} was late / nobody else wanted to / the {weather_noun_the}
        [started|stopped|got worse] / {person} asked me to / we had no choice""",
    "weather_noun_the": "rain / snow / wind / thunder / storm",
    "interruption": """
        the [phone|doorbell|alarm] rang / {person} [arrived|called|came home] / {person} came home / the
        lights went out / it started to [rain|snow|hail] / the {disaster} [hit|started] / the {pet} [ran
        away|woke up] / {person} knocked on the door""",
    "plan": """
        go to the {building} / visit {place} / have {meal} together / play {sport} / watch a movie / buy
        {a:gift} / stay home / meet at the {building} / take the {public_vehicle} to {city} / try {hobby}""",
    "goods": """
        {number} {fruit.pl} / {few} {vegetable.pl} / some {grocery} / {a:container} of {grocery} / {few}
        [bags|bottles] of {grocery} / {few} [bags|bottles] of {grocery} / {a:container} of {grocery} /
        some {fruit.pl} / {few} {stationery.pl} / some {vegetable.pl} / some [soap|toothpaste] / some
        [soap|toothpaste]""",
    "order": """
        {a:dish} / {a:dish} and {a:cafe_drink} / {few} {dish.pl} / {a:food_adj} {dish} with {grocery} /
        some {drink} / the [grilled|fried|roasted] {meat} / {few} {cafe_drinks} / the {meat} with
        {vegetable.pl} / {a:dish} without {grocery}""",
}

# Each verb on the left with the phrase on the right is one entry of {do}.
VERBS = """
    fix repair replace inspect install test: {det} {device}
    charge: {det} [phone|laptop|battery|camera|tablet]
    wash dry: the {dishware.pl}
    mop sweep: the {room} floor
    decorate renovate: the {room}
    dust drag: the {furniture}
    lift carry: the heavy {furniture}
    fold: the {clothes.pl}
    sew knit: {a:color} [scarf|hat|sweater|blanket|sock]
    peel chop slice: the {vegetable.pl}
    boil: some {vegetable.pl}
    roast grill fry: the {meat}
    bake: {a:pastry}
    stir heat: the soup
    pour spill: some {drink}
    taste smell: the {meat}
    eat order: {a:dish}
    drink: {a:cafe_drink}
    feed pet: the {pet}
    chase rescue catch: {a:animal}
    walk: the dog
    mow: the lawn
    rake: the leaves
    dig: a hole in the garden
    plant water pick: some {flower.pl}
    trim: the {tree} tree
    lock open close: the {room} door
    paint: the {room} {color}
    write review print sign approve: the {paper}
    read translate: {det} {paper}
    copy: the {paper}
    send: the {paper} to {person}
    update finish delay launch: the {project}
    attend organize postpone schedule host: the {meeting}
    cancel join: the {meeting}
    discuss explain mention: the {project} with {person}
    hire interview promote train: a new {profession}
    call thank invite visit help: {person}
    meet: {person} at the {building}
    hug kiss: my {relative}
    remind warn: {person} about the {event}
    ask convince: {person} to help
    introduce: {person} to my {relative}
    give offer: {person} {a:gift}
    lend show: {person} {det} {adj_object}
    borrow hide find lose drop: {det} {adj_object}
    buy sell: {a:adj_object}
    break damage steal: {det} {object}
    wear: {a:color} {clothes}
    describe recommend: {det} {adj_object}
    count compare: the {objects}
    study learn teach practice: {subject}
    speak: {language}
    solve: the [math|difficult|algebra] problem
    draw: {a:animal}
    photograph: the {place_adj} {building}
    film: the {event}
    watch enjoy: the {genre}
    play: {sport} with {person}
    sing: {a:song_adj} song
    explore cross: the {nature}
    climb: the [mountain|hill|ladder|stairs]
    travel drive fly move: to {city}
    leave: {place}
    park rent: the {car}
    ride: {a:vehicle}
    miss board: the [train|bus|plane|ferry] to {city}
    book reserve: {a:place_adj} hotel in {city}
    pack unpack: the [suitcase|backpack|boxes]
    win: the {sport} {contest}
    throw kick hit: the ball
    score: {few} points
    beat: {team_name}
    stretch: at the gym
    jog swim run: {few} [miles|kilometers]
    examine: the patient
    take: the {medicine}
    measure: the {gift}
    tie cut: the rope
    wrap: the {gift}
    deliver receive return: the package
    save spend donate invest waste: {price}
    pay: the {bill} bill
    search clean: the {room}
    look: for {det} {object}
    wait: for {person}
    complain: about the {topic}
    apologize: to {person}
    worry think talk forget: about the {event}
    dream: about {region}
    listen: to {music}
    laugh shout: at {person}
    smile wave point: at the {profession}
    whisper: to {name}
    build design: the {building}
    protect: the {building}
    investigate survive: the {disaster}
    vote protest: against the {official}
    choose: {a:color} {object}
    collect trade: old [stamps|coins|postcards|records]
    light: the candles
    burn: the {pastry}
    freeze: the {meat}
    mix add: some {grocery}
    squeeze: some {fruit.pl}
    fill empty: the [bowl|cup|glass|pot|kettle|pitcher|mug]
    push pull shake: {det} {furniture}
    roll: the [dice|carpet|ball]
    bend twist: the [pipe|wire|handle|cable]
    push: the {furnishings}
    adjust: the {device}
    hang remove: the [poster|mirror|shelf|picture]
    sharpen: the [knife|pencil|ax]
    spell: {det} [name|word|answer]
    support: {team_name}
    download delete upload share: the {file}
    type click: on the keyboard
    record pause: the {media}
    ignore accept reject: the offer
    answer: the [phone|question|door|email]
    admit deny: the mistake
    celebrate: my {family.own} birthday
    sleep rest: on the [sofa|couch|floor|bed|bench|carpet]
    sit stand: next to {person}
    relax: near the {nature}
    follow: the {profession}
    trust believe: {person}
    interrupt: the {meeting}
    escape: from the {building}
    dance: with {person}
    cry: during the {genre}
    hurry: to the {building}
    wander: around {city}
    shop: for {clothes.pl}
    cook prepare skip: {meal}
    hold touch: the {object}
    wake: {person}
"""

# Sentences by domain; the number after a domain's name is its weight.
SENTENCES: dict[str, str] = {
    "doing 112": """
        I {do.ed} {past}.
        we {do.ed} {past}.
        {anyone} {do.ed} {past}.
        {person} {do.ed} and then {do.ed}.
        we {do.ed} and [they|the others|everyone else] {do.ed}.
        I need to {do} {next}.
        we should {do} before we {do}.
        {anyone} {manner} {do.ed}.
        I {manner} {do.ed} {past}.
        could you {do} {next}?
        would you mind {do.ing} {next}?
        I'm [thinking about|tired of|not interested in|looking forward to|used to|responsible for] {do.ing}.
        {person} is {do.ing} {now}.
        {people} are {do.ing} {now}.
        they were {do.ing} when {interruption}.
        I was {do.ing} when {person} {do.ed}.
        while I was {do.ing}, {anyone} {do.ed}.
        instead of {do.ing}, {anyone} {do.ed}.
        after {do.ing}, we {do.ed}.
        before {do.ing}, [don't forget|remember|try] to {do}!
        did you {do} or did {person} do it?
        who {do.ed} {past}?
        why [are you|is {name}] {do.ing} {now}?
        has {name} finished {do.ing}?
        it took {duration} to {do}.
        {person} spent {duration} {do.ing}.
        how long [will it|does it|did it] take to {do}?
        {anyone} forgot to {do} {past}.
        {person} promised to {do} {next}.
        {person} {freq} {habit.s}.
        {person} {habit.s}.
        {person} {habit.s} but {freq} {habit.s}.
        my {relative} {habit.s} and {habit.s}.
        I {freq} {routine} and {do}.
        my {relative} and I usually {routine} and then {routine}.
        please {do} and then {do}!
        please stop {do.ing}, {name}!
        let's {do} {next}!
        if it [rains|snows], we'll {do} {next}.
        {person} asked me to {do} {next}.
        {person} wants to {do} because {reason}.
        I [can't|won't] {do} because {reason}.
        {anyone} {do.ed} because {reason_past}.
        the [best|worst|hardest] part of the [day|trip|job] was {do.ing}.
        {do.ing} is more {event_adj_long} than {do.ing}.
        {do.ing} [makes me|always made us] {degree} {emotion}.
        {person} was {emotion} after {do.ing}.
        nobody {do.ed} {past}.
        has {name} ever {strong.en}?
        {person} has already {strong.en}.
        I have never {strong.en} with {person}.
        {people} have just {strong.en}.
        if {name} had more time, I would {do}.
        {person} is [too {emotion}|not {emotion} enough] to {do}.
        {person} [started|stopped|kept|avoided|suggested] {do.ing} {past}.
        {name} doesn't know how to {do}.
        we were about to {do} when {interruption}.
        next time, I'll {do} with {person}.
        {person} couldn't {do} without {person}.
        do you want to {do} or {do}?
        {anyone} {do.ed} [twice|again|together|alone|by mistake|for the first time] {past}.
        when {anyone} {do.ed}, {anyone} {do.ed}.
        I would rather {do} than {do}.
        {person} taught me how to {do}.
        the {profession} {do.ed} {past}.
        the {workers} {do.ed}.
        a [young|tall|famous] {profession} {do.ed} {past}.
        {person} [is going to|has to|would like to|decided not to] {do} {next}.
        {person} is [afraid of|famous for|serious about|excited about] {do.ing}.
        what happened after {anyone} {do.ed}?
        I [saw|heard|noticed|remember] {name} {do.ing}.
        [nobody|everybody|somebody] [wants|needs] to {do} {next}.
        {mishap}.
        {mishap} and {mishap}.
        {person} {manner} left the {building} {past}.
        when it started to [rain|snow|hail], {people} {do.ed}.
        {person} {do.ed} at {clock} and {do.ed} at {clock}.
        {name} [said|told me] that {people} {do.ed} {past}.
        {anyone} {do.ed} {where}.
        {anyone} {do.ed}, so {anyone} {do.ed}.
        {person} {do.ed}, but {person} {do.ed}.
        I can't believe {mishap}.
        is it true that {mishap}?
        {person} is good at {do.ing}.
        {people} talked about {do.ing} {past}.
        I'm {emotion}, so I'm {do.ing} {now}.
        you shouldn't be {do.ing} {now}.
        we were {do.ing} while {people} were {do.ing}.
        {person} will be {do.ing} {next}.
        {person} was {do.ing} at {clock}.
        my {relative} has been {do.ing} for {duration}.
        {name} earns money by {do.ing}.
        {do.ing} takes {duration}.
        {do.ing} is [part of|the best thing about] my job.
        I dreamed that {name} was {do.ing}.
        {name} isn't {do.ing} because {reason}.
        the {workers} were {do.ing}.
        thank you for {do.ing}, {name}!
        without {do.ing}, nobody can {do}.
        {woman} says she will {do} {next}.
        {man} says he will {do} {next}.""",
    "numbers 6": """
        {number} plus {number} [is|equals] {number}.
        {number} minus {few} [is|equals] {number}.
        {few} times {few} [is|equals] {number}.
        there are {number} {workers} in the {building}.
        we counted {number} {animals} near the {nature}.
        about {number} [thousand|million] people live in {city}.
        {percent} of the {workers} [voted|stayed home].
        the {building} is {number} {length} [tall|long].
        it's {number} {distance} from {city} to {city}.
        page {number} is missing.
        please turn to page {unit} hundred and {number}!
        {person} has [seat|ticket|room] number {number}.
        the answer is {number}, not {number}.
        {person} is {number} years old.
        my {relative} turned {number} {past}.
        the total is [about|almost] {big_number}.
        {few} out of {tens} {objects} were {object_adj}.
        how many {objects} [do you need|did you count|are there]?
        we ordered {big_number} {objects} but only {number} arrived.
        the [train|bus|flight] was {number} minutes late.
        chapter {number} is about {subject}.
        this {furniture} weighs {number} kilograms.
        the {furniture} is {number} {length} long.
        divide {big_number} by {few}!
        {person} finished in {ordinal} place.
        this is the {ordinal} {event} {where}.
        the {ordinal} {profession} {do.ed}.
        our {room} is {few} meters by {few}.
        guess a number between {number} and {big_number}!""",
    "codes 4": """
        my [phone number|number|new number] is {phone_number}.
        call me at {phone_number}!
        the [reference|booking] code is {reference}.
        your [order|customer|invoice] number is {reference}.
        the [password|access code] for the {building} is {reference}.
        please dial {phone_number} and ask for {person}!
        can you confirm the number {phone_number}?
        flight {code_word} {digit} {digit} {digit} to {city} is [delayed|boarding|canceled|on time].
        [gate|platform] {number} is [closed|open] {next}.
        is your code {reference} or {reference}?
        the [license plate|serial number] is {reference}.
        enter {digit} {digit} {digit} {digit} on the keypad!
        {name} {surname}, reference {reference}.""",
    "dates 9": """
        could you move the {meeting} with {person} to {date}, at {clock}?
        the birthday of my {relative} is on {date}.
        the {event} [is|was|starts] on {date}.
        {person} was born on {date}, {year}.
        {person} was born in {city} in {year}.
        we [got married|met|graduated|moved here] in {year}.
        the {building} in {city} was built in [eighteen {tens} {unit}|{year}].
        what time does the {event} [start|finish] in {city}?
        what time is it in {place}?
        it's {clock}.
        the {meeting} [starts|begins] at {clock}.
        let's meet {where} at {clock}!
        [today|tomorrow] is {weekday}, the {day_number} of {month}.
        the {building} [opens|closes] at {clock} on {weekday}.
        are you [free|busy] on {date}?
        {person} [arrives|leaves] on {date}.
        I have {a:meeting} with {person} at {clock}.
        the deadline is {weekday} at {clock}.
        we're closed from {month} to {month}.
        {weekday} is better for me than {weekday}.
        the passport of {name} {surname} expires in {month} {year}.
        {meal} is [served|ready] at {clock}.
        the last {public_vehicle} leaves at {clock}.
        it happened in {month}, {year}, in {place}.
        {person} moved from {place} to {place} in {year}.
        set the alarm for {clock}!
        wake me up at {clock}, please!
        can we meet at {clock} instead of {clock}?
        the {event} lasted from {clock} until {clock}.
        {season} begins in {month}.
        we've known each other since we lived in {place} in {year}.
        {name} and {name} have known each other since {year}.
        I'll be {where} until {clock}.""",
    "prices 7": """
        the {adj_object} costs {price}.
        how much [is|was] the {adj_object}?
        {person} paid {price} for {a:adj_object}.
        {person} bought {a:adj_object} for {price}.
        {price} is too much for {a:object}.
        I sold my {object} for {price}.
        {goods} will be {price}, please.
        a ticket to {place} costs {price}.
        the rent in {city} [went up|fell] by {price}.
        do you have change for {price} in cash?
        can I pay {price} [by card|in cash]?
        everything in the {shop} is {tens} percent off {next}.
        the {bill} bill was {price} [this month|last month|in total].
        {person} owes me {price}.
        is there a discount for [students|children] at the {building} {next}?
        we saved {price} on {grocery}.
        the repair of the {device} will cost {price}.
        {clothes.pl} are on sale for {price}.
        {a:container} of {grocery} is {price}.
        {person} earns {price} [an hour|a day|a week|a month].
        the {vehicle} was sold for {price}.
        the {car} is worth {price}.""",
    "names 10": """
        my name is {name} {surname}.
        this is {name} {surname} from {department}.
        {name}, this is {kin}.
        have you met {name} {surname}?
        {name} {surname} works as {a:profession} in {city}.
        {person} lives on {street} in {city}.
        {name} {surname} and {name} {surname} {do.ed} {past}.
        I'd like to speak with {name} {surname}, please.
        {title} {surname} will see you now.
        {name} looks like {name}.
        where is {name}?
        {name} grew up in {place}.
        do you know {name} from {place}?
        {title} {surname} [retired|resigned|called|left] {past}.
        {name} married {a:profession} from {region}.
        {people} live near {city}.
        {name} is {a:person_adj} {profession}.
        {name} and {name} are from {place}.
        my {relative} is {a:profession}.
        is {name} {surname} your [teacher|neighbor|boss|lawyer|dentist]?
        I sat next to {name} {surname} {past}.
        {name} is as {person_adj} as {name}.
        who is [taller|older], {name} or {name}?
        {person} was {person_adj} and {person_adj}.
        the {profession} was {degree} {person_adj}.
        {person_adj} people are {freq} {person_adj}.
        my {relative} is {degree} {person_adj}.
        {name} is {emotion} and {name} is {emotion}.
        tell {name} that {name} is {where}!
        the new {profession} is called {name} {surname}.
        {a:person_adj} {profession} [helped|thanked|called] {person}.
        {man} and {woman} named their [baby|daughter] {woman}.
        {woman} and {man} named their [baby|grandson] {man}.""",
    "travel 12": """
        {person} is [flying|traveling|moving|driving] to {place} {next}.
        have you ever been to {place}?
        I've never been to {place}, but {name} has.
        how far is {city} from {city}?
        we spent {duration} in {place} {past}.
        the flight from {city} to {city} takes {few} hours.
        two tickets to {city}, please!
        I'd like a one way ticket to {city}, please!
        is there a direct [train|bus|flight|ferry] from {city} to {city}?
        our {public_vehicle} to {city} leaves at {clock}.
        the {public_vehicle} to {city} was [delayed|canceled] because of the {disaster}.
        the hotel in {city} was {degree} [clean|dirty|expensive|comfortable|cheap|modern].
        we stayed in {a:place_feel} [hotel|apartment] near {city}.
        {city} is [bigger|cheaper] than {city}.
        {city} is famous for its {place_adj} {buildings}.
        the {building} in {city} is {degree} {place_feel}.
        there is {a:place_adj} {building} in the center of {city}.
        {region} is {direction} of {region}.
        {place} is beautiful in {season}.
        the {buildings} and {buildings} of {city} are {degree} {place_feel}.
        there are {few} {place_adj} {buildings} on {street}.
        people in {region} [speak|understand|learn] {language}.
        do you speak {language} or {language}?
        how do you say {word} in {language}?
        {person} speaks {language} and {language}.
        {person} can read {language} but not {language}.
        my passport was stolen in {city}.
        we rented {a:car} and drove across {region}.
        I lost my [suitcase|passport] at the {building} in {city}.
        {people} are on vacation in {place}.
        we visited {place}, {place} and {place} {past}.
        would you rather [visit|live in] {place} or {place}?
        the best {meat} comes from {place}.
        {person} sent me a [postcard|letter] from {place}.
        I need a [double|quiet|large] room in {city} for {few} nights, please!
        {number} tourists visited the {place_adj} {building} {past}.
        the [highway|road] between {region} and {region} is closed.
        {name} took the {public_vehicle} to {city}.
        {name} travels from {city} to {city} by {vehicle}.
        a strong {direction} wind kept the boats in the harbor of {city} for {few} days.
        which {public_vehicle} goes to {city}?
        please fasten your seat belt, {title} {surname}, we're landing in {city}!
        the captain said we will land in {city} {next}.
        the {car} ran out of gas near {city}.
        {vehicles} are not allowed on {street}.
        {a:color} {car} is parked outside the {building}.""",
    "directions 6": """
        how do I get to the {building}?
        turn [left|right] at the {building}!
        turn [left|right] onto {street} and go straight!
        go {direction} on {street} for {number} [miles|meters|minutes]!
        the {building} is on the [left|right], next to the {building}.
        the {building} is [across from|behind|close to] the {building}.
        walk past the {building} and cross the [bridge|street|square|river]!
        take the {ordinal} [street|road] on the [left|right] after the {building}!
        is there {a:building} near here?
        is the {building} on {street} still open?
        you will see {a:place_adj} {building} on the corner of {street}.
        follow {street} until you reach the {building}!
        it's {a:number} minute walk from the {building}.
        excuse me, where is the [nearest|closest] {building} to {street}?
        we got lost [between|somewhere between] {city} and {city}.
        the {building} is {number} blocks {direction} of the {building}.
        there's an accident on {street}, so take {street} instead!
        {person} lives at {number} {street}.
        the address is {number} {street}, {city}.
        our office is on the {ordinal} floor of the {building}.
        avoid the {public_vehicle} and take the {public_vehicle} to the {building}!
        from the {building}, head {direction} towards the {nature}!""",
    "weather 8": """
        it's {degree} {weather_adj} in {place} {lately}.
        it was {degree} {weather_adj} {past}.
        what's the weather like in {place}?
        will it be {weather_adj} in {city} {next}?
        tomorrow will be {weather_adj} and {weather_adj}.
        expect {weather_noun} in {place} {next}.
        the forecast says {weather_noun} in {city} for {weekday}.
        the temperature in {city} is {temperature}.
        the temperature [dropped|rose|fell|climbed] to {temperature} {past}.
        we had {weather_noun} and {weather_noun} {past}.
        {name}, take [an umbrella|a warm coat|your gloves], because it's {weather_adj} in {place}!
        {season} in {place} is {freq} {weather_adj}.
        there will be {weather_noun} from the {direction}.
        {a:disaster} [hit|damaged] {place} {past}.
        {weather_noun} is expected in {region} {next}.
        {name} doesn't like {weather_noun}.
        because of {weather_noun}, the {event} was [canceled|delayed|moved].
        it's too {weather_adj} to {plan}.
        the sky over {place} is [bright|dark|gray] [today|tonight|right now|again|this morning].
        the [sun|moon] rises at {clock} in {city}.
        it [rained|snowed] for {duration} in {place}.
        {month} was the [hottest|coldest] month in {place}.
        if it's {weather_adj} {next}, let's {plan}!
        I prefer {season} to {season}.
        the {nature} looks {event_adj} in {season}.""",
    "food 17": """
        I'd like {order}, please!
        can I have {order}?
        could we get {order} and {order}?
        could we have {few} {cafe_drinks} and {few} {cafe_drinks}, please?
        {name} drank {few} {cafe_drinks} {past}.
        {person} ordered {order}.
        I'll have {order}, and {name} wants {order}.
        the {dish} was too {taste}.
        the {food_adj} {dish} is {degree} good.
        would you like some {grocery} with your {dish}?
        do you prefer {drink} or {drink}?
        do you want {a:cafe_drink} or {a:cafe_drink}?
        we need {goods} and {goods}.
        please buy {goods} on the way home!
        add {goods} to the shopping list!
        there is no {grocery} left.
        do we still have {grocery} and {grocery}?
        I'm allergic to {grocery} and {grocery}.
        {person} doesn't eat {meat} or {grocery}.
        {person} made {food_adj} {dish.pl} for {meal}.
        mix the {grocery} with the {grocery} and stir!
        bake the {pastry} for {tens} minutes at [two|three|four] hundred [degrees|and fifty degrees]!
        cut the {vegetable.pl} and fry them with the {meat}!
        wash the {fruit.pl} and give them to {name}!
        {name} gave me {a:fruit} and {a:vegetable}.
        I like {fruit.pl}, {fruit.pl} and {fruit.pl}.
        {fruit.pl} are [cheaper|better] than {fruit.pl}.
        {person} hates {vegetable.pl}.
        {name} hates the {vegetable} in the {dish}.
        is this {a:vegetable} or {a:vegetable}?
        {person} eats {dish.pl} and {dish.pl} every {weekday}.
        do you sell {dish.pl} with {vegetable.pl}?
        these {vegetable.pl} are {taste}.
        {name} ate {a:fruit} and {a:fruit} for {meal}.
        would you like {a:fruit} or {a:fruit}?
        {a:taste} {fruit} is better than {a:taste} {vegetable}.
        {person} put {a:vegetable} and {a:fruit} on the {surface}.
        the {fruit} and the {vegetable} are {taste}.
        the {taste} {drink} is from {place}.
        is there {grocery} in the {dish}?
        {person} says this {meat} tastes {taste}.
        the {drink} is too [hot|cold|strong|sweet].
        {meal} was {event_adj}, thank you!
        we had {dish.pl} for {meal} {past}.
        a table for {few} at {clock}, please!
        the [lunch|dinner|dessert] menu has {food_adj} {dish.pl} for {price}.
        the waiter [brought|forgot|spilled] the {drink} for {name}.
        {name} spilled {drink} on the {surface}.
        {dish.pl} with {grocery} are my favorite food.
        {name} sells {dish.pl} and {dish.pl} near the {building}.
        how many {dish.pl} can {person} eat?
        this {pastry} needs more {grocery}.
        there is too much {grocery} in the {dish}.
        we grow {vegetable.pl} and {fruit.pl} in the garden.
        {a:food_adj} {dish} for me and {a:food_adj} {dish} for {name}!""",
    "commands 10": """
        turn [on|off|up|down] the {smart_device} before {person} [arrives|comes home|wakes up]!
        please turn [on|off] the {smart_device} in the {room}!
        switch off the {smart_device} [at|before|after] {clock}!
        turn the {smart_device} on at {clock}!
        set the {room} temperature to {temperature}!
        set a timer for {number} [minutes|seconds] when you {do}!
        dim the lights in the {room} to {number} percent!
        remind me to {do} {next}!
        remind {name} to {do} at {clock}!
        add {grocery} and {grocery} to my shopping list!
        call {name} {surname} on [speaker|video]!
        call my {relative}!
        send a message to {person} about the {event}!
        text {name} that {person} is {emotion}!
        play some {music} in the {room}!
        play the latest album by {name} {surname}!
        play the {ordinal} [song|episode] again!
        [pause|stop] the {media} by {name} {surname}!
        turn the volume of the {media} [up|down] to {number}!
        [delete|open|share|download] the {file} called {word}!
        search for {object_adj} {objects} online!
        find {a:building} near {street}!
        how long is the drive to {city}?
        show me pictures of the {buildings} in {place}!
        what's on my calendar for {weekday}?
        cancel my {meeting} with {name} on {weekday}!
        lock the {room} door and {do}!
        please close the {room} window when it's {weather_adj} in {city}!
        {name} bought a vacuum cleaner in {city} for {price}.
        read my emails from {name} {surname}!
        translate {word} into {language}!
        wake me at {clock} on {weekday}!
        who sang the {song_adj} song about {place}?
        [open|close] the [curtains|windows] in the {room} at {clock}!
        don't disturb {name} until {clock}!
        order {goods} from the {shop}!
        please charge the {device} {next}!
        {person} says the {device} in the {room} is not working.
        why is the {smart_device} in the {room} still on, {name}?
        {person} says the {device} [stopped working|needs a new battery].
        where did you put the {device}?
        {name}, please bring me the {object}!
        please put the {object} on the {surface}!
        don't touch the {object}!
        pass me the {adj_object} and the {dishware}, please!
        hand me the {tool}, please!
        bring {a:tool} and {a:tool}!
        be [quiet|careful|patient|honest|brave|polite], please!""",
    "things 20": """
        {person} [put|left|found|saw] {det} {object} [on|under|behind|next to] the {surface}.
        where is {det} {object}?
        have you seen {det} {adj_object}?
        whose {adj_object} is this?
        the {furniture} is made of {material} and {material}.
        my {clothes} is made of {cloth}.
        I'm looking for {a:adj_object} for my {relative}.
        {name} needs {a:tool} and {a:tool}.
        there is {a:adj_object} on the {surface}.
        there are {few} {objects} in the {room}.
        the {furniture} in the {room} is {degree} {object_adj}.
        the {adj_object} belongs to {person}.
        I want the {color} {clothes}, not the {color} one.
        do you have this {clothes} in {color}?
        the {color} {clothes} looks {degree} good on you.
        {person} wore {a:color} {clothes} and {a:color} {clothes}.
        these {clothes.pl} are too [big|small|long|short] for {name}.
        my {clothes} is {object_adj} and {color}.
        {name} gave me {a:gift} for my birthday.
        {person} got {a:gift} and {a:toy} for Christmas.
        the {pet} is sleeping under the {surface}.
        the {pet} broke the {dishware}.
        {a:animal} is [bigger|faster] than {a:animal}.
        we saw {a:animal} and {few} {animals} near the {nature}.
        {animals} and {animals} live near the {nature}.
        {animals}, {animals} and {animals} are my favorite animals.
        is that {a:animal} or {a:animal}?
        {name} drew {a:animal} on the {building} wall.
        {name} is as {person_adj} as {a:animal}.
        {a:color} {animal} and {a:animal} crossed {street}.
        the {animal} chased the {animal} across the [field|garden|street|park].
        {animals} can be [clever|brave|shy|lazy|quiet|gentle|curious], but {animals} are not.
        why are {animals} afraid of {animals}?
        the {animal} is [eating|hiding|sleeping|drinking] near the {nature}.
        are you afraid of {animals}?
        {person} has {few} {animals} and {a:pet}.
        {person} adopted a [clever|shy|lazy|quiet|gentle|curious|friendly] {pet} {past}.
        we planted {flower.pl} and {flower.pl} next to the {tree} tree.
        {flower.pl} smell better than {flower.pl}.
        the {flower.pl} near the {nature} are blooming in {month}.
        an old {tree} tree fell on the {car}.
        the {nature} is full of {animals}.
        {person} thinks {material} is [more expensive|more useful|more beautiful] than {material}.
        {name} thinks {cloth} is [thicker|softer] than {cloth}.
        do you sell {objects} or {objects}?
        {color} and {color} are my favorite colors.
        paint the {furniture} {color}!
        the {room} walls are {color} and the {furniture} is {color}.
        I bought {few} {stationery.pl} and {a:stationery}.
        the {dishware.pl} and the {dishware.pl} are [on|under] the {surface}.
        the {tool} is {object_adj}, so use the {tool}!
        {name} dropped {a:dishware} on the {room} floor.
        the children are playing with {a:toy}.
        {a:toy}, {a:toy} and {a:gift} were on the {surface}.
        can I borrow your {object} {next}?
        {person} collects {object_adj} {objects}.
        the {shop} sells {objects} and {objects}.
        the {vehicle} is faster than the {vehicle}.
        our {car} is too {object_adj}.
        this {cloth} {clothes} is {degree} {object_adj}.
        {vehicles} and {vehicles} were blocking {street}.""",
    "small talk 14": """
        how are you today, {name}?
        good [morning|afternoon|evening], {title} {surname}!
        hello {name} {surname}, it's nice to meet you!
        thank you for the {gift}, {name}!
        thanks for [coming|calling|helping|waiting|listening], {title} {surname}!
        I'm sorry about the {topic}.
        I'm {emotion} because {reason}.
        you look {emotion}, {name}.
        how was your {event}?
        did you enjoy the {event} in {city}?
        the {event} was {degree} {event_adj}.
        {person} has {a:event_adj} [idea|plan|story|dream] about the {event}.
        {person} made {a:event_adj} mistake {past}.
        that's {a:event_adj} [idea|plan|question], {name}.
        {person} told us {a:event_adj} story about {place}.
        the view of the {nature} from the {building} is {event_adj}.
        it was a [nice|lovely|great] surprise to see {person} {where}.
        {person} took a [nice|lovely|great] picture of the {building} in {city}.
        have a [nice|lovely|great] [weekend|trip|holiday] in {place}, {name}!
        see you {next} {where}, {name}!
        what are you and {name} doing {next}?
        what do you think about {subject}?
        I agree with {person} about the {topic}.
        {person} disagrees with {person} about the {topic}.
        {name} asked about my favorite [movie|song] {past}.
        my favorite sport in {season} is {sport}, not {sport}.
        {hobby} is my favorite hobby, but {name} prefers {hobby}.
        {person} loves {hobby} and {hobby}.
        {person} is [good|bad|terrible|great] at {hobby}.
        {hobby} is {degree} {event_adj}.
        do you like {hobby}?
        I started {hobby} {past}.
        {people} went [hiking|fishing|swimming|camping|shopping|dancing|cycling|skiing] {past}.
        {person} plays the {instrument} and the {instrument}.
        is that {a:instrument} or {a:instrument}?
        {name} sold {a:instrument} to {name} for {price}.
        {name} practices the {instrument} in the {room}.
        my {relative} is learning to play the {instrument}.
        that {media} was {degree} {event_adj}.
        have you seen the new {genre} with {name} {surname}?
        {a:genre} is better than {a:genre}.
        I [love|enjoy] {music}, but {name} [loves|hates] {music}.
        {people} danced to {music} {past}.
        {person} listens to {music} while {hobby}.
        happy birthday, {name} {surname}!
        {person} said goodbye to {person} {where}.
        congratulations on your [promotion|wedding|graduation], {name} {surname}!
        I feel {emotion} [tonight|in the morning|at night|when I'm alone] because {reason}.
        don't be {emotion}, {name}!
        why are you so {emotion}?
        how long have you lived in {place}?
        where are you from?
        are you from {place} or {place}?
        I miss {place} and my {relative}.
        {title} {surname} should speak [louder|more slowly] {next}.
        {person} doesn't understand the [question|answer] about {subject}.
        no, I've never heard of {name} {surname}.
        yes, {name} told me about the {event}.
        are you coming to the {event} with {name}?
        {people} were invited to the {event}.
        the {event} will take place at the {building} {next}.
        {people} bought {clothes.pl} and {clothes.pl} for the {event}.
        who else is coming to the {event}?
        it was {a:event_adj} {event}.
        it's {event_adj} to {do}.
        {name} and I hope the {event} will be {event_adj}.
        in my opinion, {subject} is more {event_adj_long} than {subject}.""",
    "work 12": """
        please send the {paper} to {person} {next}!
        the {paper} [is|was|will be] ready [tomorrow|tonight|next week|on {weekday}|by noon].
        have you read the {paper} about the {news_noun}?
        {person} [wrote|signed|lost] the {paper} {past}.
        the {meeting} with {person} was [canceled|postponed|moved|short].
        the {meeting} will be in the {office_room}.
        {person} is waiting in the {office_room}.
        who is responsible for the {project}?
        {person} is in charge of the {project}.
        {person} says the {project} is [behind schedule|almost finished|too expensive].
        {person} needs more [time|people|money] for the {project} in {place}.
        the {department} department [approved|rejected|changed] the {project} {past}.
        {person} works in {department}.
        {name} moved from {department} to {department} {past}.
        we hired {a:person_adj} {office_job} for the {department} team.
        our {department} team needs {a:person_adj} {office_job}.
        {person} [got|asked for] a [promotion|raise|bonus].
        {person} quit {past} because {reason_past}.
        I'm [running late|on my way|working from home|on a call] [today|again|right now].
        can you print {number} copies of the {paper}?
        there is a mistake on page {number} of the {paper}.
        {person} missed the {meeting} because {reason_past}.
        the {device} in the {office_room} is broken again.
        sales in {region} [rose|fell|grew|dropped] by {percent}.
        our biggest customers are from {region} and {region}.
        let's discuss the {project} {next}!
        the client from {city} [liked|hated|wants] the {project}.
        {person} will present the {project} {next}.
        please attach the {paper} to the email for {name}!
        did everyone receive the {paper}?
        do you have any questions about the {paper} or the {project}?
        my [manager|boss|client] is {degree} {person_adj}.
        {name} has worked here for {number} years.
        our new office is in {city}, near the {building}.""",
    "health 11": """
        my {body} [hurts|is swollen|feels better|still hurts] after {hobby}.
        {person} has {a:illness}.
        {person} broke [an arm|a leg|a finger|an ankle] while {hobby}.
        I have {a:illness} and {a:illness}.
        how long has {name} had {a:illness} and {a:illness}?
        {person} takes {few} [pills|tablets|vitamins] [before|after] {meal}.
        take this {medicine} [two|three|four] times a [day|week]!
        the {medical} gave me {a:medicine} for my {illness}.
        {person} says this {medicine} [helps|works] against {a:illness}.
        I need an appointment with the {medical}.
        {person} has a [sore|swollen|painful] {body} after {hobby}.
        does your {body} hurt [at night|when you walk|when you sit|after {hobby}]?
        the {medical} examined my {body} and my {body}.
        {person} was in the hospital for {duration}.
        {name} caught {a:illness} in {place}.
        {person} should [rest|sleep|drink more water|see a doctor] {next}.
        please raise your [left|right] [arm|leg|hand|foot|knee]!
        touch your {body} with your [left|right] [hand|foot|elbow]!
        {name} feels [sick|better|worse] {lately}.
        is {name} allergic to {grocery}?
        {person} says {grocery} is [good|bad] for your {organ}.
        {person} says [stress|smoking|alcohol|sugar] is bad for your {organ}.
        call an ambulance, {person} [fell down the stairs|can't breathe]!
        the surgery on {name} {surname} took {few} hours.
        {person} knows that {hobby} is good for your {organ}.
        {person} lost {number} pounds in {few} months.
        {person} slept for {few} hours {past}.""",
    "family 8": """
        my {relative} and my {relative} live in {place}.
        {kin} was born in {place}.
        my {female_relative} and her {relative} {do.ed} {past}.
        my {male_relative} and his {relative} {do.ed} {past}.
        my {relative} has {few} children.
        my {relative} [got married|graduated|retired|moved] in {year}.
        my {family.own} {object} is {color}.
        my {family.own} {object} is {object_adj}.
        is that your {family.own} {object}?
        your {relative} called {past}.
        {woman} is my {family.own} best friend.
        {man} is my {family.own} [boss|teacher|neighbor|lawyer].
        {person} said the baby is [crying|hungry|smiling].
        the children are {emotion} because {reason}.
        the [twins|children] {do.ed} {past}.
        how old is your {relative}?
        {people} have been married for {number} years.
        my {relative} is {tens} and my {relative} is {tens} {unit}.
        {name} looks just like my {relative}.
        {name} has [brown|blue|green] eyes and [long|short|straight] hair.
        our whole family {do.ed} {past}.
        my {relative} always says that {hobby} is {event_adj}.
        {woman} loves her {relative}, and her {relative} loves {animals}.
        give my best wishes to {person} in {place}!
        my {relative} makes the best {dish.pl} in {city}.
        my parents met in {place} in {year}.""",
    "school 8": """
        {person} [studies|teaches|loves|hates] {subject}.
        we have {subject} and {subject} on {weekday}.
        I have {a:assignment} in {subject} {next}.
        the {subject} {school_test} was {degree} {event_adj}.
        {person} got {number} points on the {subject} {school_test}.
        did you finish the {subject} {school_test}?
        open your [book|notebook|textbook] to page {number}!
        the {subject} teacher is {degree} {person_adj}.
        {name} wants to become {a:profession} or {a:profession}.
        {name} thinks {subject} is harder than {subject}.
        {person} wrote an essay about {news_noun} in {region}.
        the students {do.ed} in the {subject} class.
        school starts again on {date}, at {clock}.
        {name} goes to a [small|big|private|new] school in {city}.
        please bring {a:stationery} and {a:stationery} to class!
        there are {number} students in our {subject} class.
        raise your hand if you know the answer to question {number} about {subject}!
        {name} has to study for the {subject} exam.
        {person} studied {subject} in {place}.
        the {subject} book is on the {surface}.
        who can explain {subject} to me?
        the school bell rings at {clock} on {weekday}.
        our class visited the {building} in {city}.
        {person} speaks {language} because {reason}.
        {name} forgot {a:stationery} and {a:stationery}.
        {name} says {subject} is my [best|worst|favorite] subject.""",
    "sports 8": """
        {team_name} beat {team_name} by {number} points.
        {team_name} lost to {team_name} {past}.
        {team_name} [won|lost] the {sport} {contest}.
        the final score was {number} to {number}.
        {name} {surname} scored {number} points for {team_name}.
        who won the {sport} {contest}?
        who is playing {next}, {team_name} or {team_name}?
        {person} plays {sport} and {sport}.
        do you want to play {sport} {next}?
        I'd rather watch {sport} than {sport}.
        the {sport} {contest} between {region} and {region} starts at {clock}.
        {name} {surname} [signed with|left|joined] {team_name}.
        {region} won a [gold|silver] medal in {sport}.
        {person} ran the marathon in {few} hours and {number} minutes.
        the {sport} coach was {emotion} after the {contest}.
        the fans of {team_name} are {emotion}.
        tickets for the {sport} {contest} cost {price}.
        {team_name} will play in {city} {next}.
        {name} {surname} hurt [an arm|a leg|a hand|a foot|a knee] during the {sport} {contest}.
        we play {sport} behind the {building} [every|every other|each] {weekday}.
        {sport} is more popular than {sport} in {region}.
        the crowd cheered when {name} {surname} scored.
        {team_name} need a new [coach|captain|stadium].
        {name} trains {number} hours a week for the {contest}.""",
    "news 9": """
        the {leader} of {region} [visited|criticized] the {leader} of {region}.
        the {leader} of {region} [announced|rejected] a new law on {news_noun}.
        the {official} wants to spend {money} on {news_noun}.
        {news_noun} is the most important issue for [voters|families] in {region}.
        {percent} of voters in {region} support the {official}.
        {a:disaster} in {region} [killed|injured] {number} people {past}.
        after the {disaster}, {big_number} people lost their homes.
        the {official} met {workers} from {region} {past}.
        [teachers|nurses|drivers|farmers] in {place} are on strike {lately}.
        police arrested {number} people in {city} {past}.
        the {official} blamed the {disaster} on the {official}.
        {region} and {region} signed an agreement on {news_noun}.
        a new {building} will open in {city} {next}.
        firefighters saved {number} people from the burning warehouse.
        scientists in {region} discovered a new [planet|virus] {past}.
        prices for {grocery} [rose|fell] by {percent} in {region}.
        the company lost {money} {past}.
        the company from {city} said the results were {event_adj}.
        experts are [worried|optimistic] about {news_noun} in {region}.
        {name} {surname} won the election in {region}.
        the {official} resigned {past} after a scandal.
        thousands of people protested in {city} against [inflation|pollution] {past}.
        the trial of {name} {surname} begins {next}.
        an unknown {profession} won {money} in the lottery.
        the {building} in {city} was [closed|damaged] because of the {disaster}.
        traffic on {street} is [slow|heavy] because of the {event}.
        the {official} raised taxes on {grocery} by {percent}.
        {name} {surname}, a [retired|young] {profession} from {city}, {do.ed} {past}.""",
    "opinions 8": """
        I think {name} is {emotion} about the {topic}.
        I'm sure {anyone} {do.ed} {past}.
        nobody knows why {anyone} {do.ed}.
        I wonder who {do.ed}.
        maybe {person} will {do} {next}!
        perhaps we should {plan} {next}!
        it's [strange|wonderful|funny] that {anyone} {do.ed}.
        {person} claims that {anyone} {do.ed} {past}.
        {name} [thinks|says|hopes] that {place} is {event_adj}.
        {people} decided to {plan} {next}.
        why don't we {plan} {next}?
        shall we {plan} or {plan}?
        {name} suggested that we {plan}.
        I'd love to {plan} with {name}.
        we could {plan} if [you have time|{name} is free].
        {people} want to {plan} {next}.
        {person} hopes to {plan} {next}.
        unless it rains, {people} will {plan}.
        neither {name} nor {name} {do.ed}.
        the {profession} and the {profession} {do.ed} together.
        {name} is not {a:profession} but {a:profession}.
        I dreamed about {a:animal} and {a:adj_object}.
        once upon a time, {a:person_adj} {profession} lived in {a:place_adj} {building}.
        the {place_adj} {building} reminds me of {place}.
        {people} got lost near the {nature}.
        the {nature} near {city} is {degree} {place_feel}.
        there used to be {a:building} on {street}.
        the {building} is not as {place_feel} as the {building}.
        whoever {do.ed} should apologize to {person}.""",
}


# Phrases that may precede a sentence, by the last character of the sentence in SENTENCES
OPENERS: dict[str, str] = {
    ".": """
        well, / by the way, / honestly, / actually, / apparently, / you know, / of course, / to be honest, /
        believe it or not, / as far as I know, / I think / I heard that / I'm afraid / it seems that /
        it turns out that / {person} [said|told me|thinks|says|claims] that / {name},""",
    "?": "so, / and / but / excuse me, / sorry, / by the way, / tell me, / {name}, / {title} {surname},",
    "!": "okay, / all right, / {name}, / {name},",
}
OPENER_SHARE = 0.12
SHORT_OPENER_SHARE = 0.5
ENOUGH = 2_500  # templates with fewer texts are drawn less often, and get an opener more often

# Base, past and participle of the irregular verbs
IRREGULAR_VERBS = """
    bend bent bent, break broke broken, build built built, buy bought bought, catch caught caught, choose
    chose chosen, cut cut cut, dig dug dug, draw drew drawn, drink drank drunk, drive drove driven, eat
    ate eaten, feed fed fed, find found found, fly flew flown, forget forgot forgotten, freeze froze
    frozen, give gave given, go went gone, hang hung hung, hide hid hidden, hit hit hit, hold held held,
    leave left left, lend lent lent, light lit lit, lose lost lost, meet met met, pay paid paid, read read
    read, ride rode ridden, run ran run, sell sold sold, send sent sent, sew sewed sewn, shake shook
    shaken, show showed shown, sing sang sung, sit sat sat, sleep slept slept, speak spoke spoken, spend
    spent spent, stand stood stood, steal stole stolen, sweep swept swept, swim swam swum, take took
    taken, teach taught taught, think thought thought, throw threw thrown, wake woke woken, wear wore
    worn, win won won, write wrote written, beat beat beaten
"""
DOUBLED = {"forget", "admit"}  # their last letter, as in one-syllable verbs: stop, stopped
IRREGULAR_PLURALS = """
    foot feet, tooth teeth, mouse mice, goose geese, sheep sheep, wolf wolves, knife knives, scarf scarves,
    bookshelf bookshelves, potato potatoes, tomato tomatoes, mango mangoes, goldfish goldfish
"""
AN = re.compile(r"(?!uni[^nm]|use|uku|euro|one\b)[aeiou]|hour|honest", re.IGNORECASE)
REPEATABLE = {"digit", "unit"}  # every other list gives an entry once in a sentence

_SLOT = re.compile(r"\{(a:)?(\w+)(?:\.(\w+))?\}")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def _rows(table: str) -> dict[str, list[str]]:
    return {row.split()[0]: row.split() for row in table.split(",")}


_VERB_ROWS = _rows(IRREGULAR_VERBS)
_PLURAL_ROWS = _rows(IRREGULAR_PLURALS)


def _with_s(word: str) -> str:
    """Third person of a verb, or plural of a noun."""
    if re.search(r"(s|x|z|ch|sh)$", word) or word in ("go", "do"):
        return word + "es"
    return re.sub(r"([^aeiou])y$", r"\1ie", word) + "s"


def _stem(verb: str, ending: str) -> str:
    """The spelling of the verb before "ed" or "ing": stop, stopp; bake, bak; carry, carri."""
    if verb in DOUBLED or re.fullmatch(r"[^aeiou]*[aeiou][^aeiouwxy]", verb):
        return verb + verb[-1]
    if ending == "ing":
        return verb[:-2] + "y" if verb.endswith("ie") else re.sub(r"([^eoy])e$", r"\1", verb)
    return re.sub(r"([^aeiou])y$", r"\1i", verb.removesuffix("e"))


def inflect(entry: str, form: str) -> str:
    """The entry in one of the forms in the docstring of this module."""
    if form == "own":
        return entry + "'s"
    if form == "pl":
        *before, noun = entry.split(" ")
        return " ".join([*before, _PLURAL_ROWS[noun][1] if noun in _PLURAL_ROWS else _with_s(noun)])
    verb, *rest = entry.split(" ")
    if form == "s":
        verb = _with_s(verb)
    elif form == "ing":
        verb = _stem(verb, "ing") + "ing"
    elif verb in _VERB_ROWS:
        verb = _VERB_ROWS[verb][1 if form == "ed" else 2]
    else:
        verb = _stem(verb, "ed") + "ed"
    return " ".join([verb, *rest])


class Slot(NamedTuple):
    article: bool
    key: str
    form: str


Parts = tuple[str | Slot, ...]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _entries(text: str, separator: str | None) -> list[str]:
    return [" ".join(entry.split()) for entry in text.split(separator)]


def _grammar() -> dict[str, list[str]]:
    """The entries of each name that a slot can have."""
    grammar = {key: _entries(text, "/") for key, text in RULES.items()}
    grammar |= {key: _entries(text, "," if "," in text else None) for key, text in LISTS.items()}
    rows = [row.split(": ") for row in _lines(VERBS)]
    grammar["do"] = [f"{verb} {rest}" for verbs, rest in rows for verb in verbs.split()]
    strong = {verb for verb, past, participle in _VERB_ROWS.values() if past != participle}
    grammar["strong"] = [entry for entry in grammar["do"] if entry.split()[0] in strong]
    return grammar


_GRAMMAR = _grammar()


def _parts(text: str) -> Parts:
    """Split a text into literals and slots. Each [choice] becomes a new entry of the grammar."""
    while match := _CHOICE.search(text):
        key = f"choice{len(_GRAMMAR)}"
        _GRAMMAR[key] = match[1].split("|")
        text = text[: match.start()] + "{" + key + "}" + text[match.end() :]
    parts: list[str | Slot] = []
    end = 0
    for match in _SLOT.finditer(text):
        parts += [text[end : match.start()], Slot(bool(match[1]), match[2], match[3] or "")]
        end = match.end()
    return tuple(part for part in [*parts, text[end:]] if part)


@cache
def _options(key: str, form: str) -> tuple[Parts, ...]:
    return tuple(_parts(inflect(entry, form) if form else entry) for entry in _GRAMMAR[key])


def _expand(parts: Parts, rng: random.Random, used: set[Parts]) -> str:
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        options = _options(part.key, part.form)
        chosen = rng.choice(options)
        if part.key in LISTS and part.key not in REPEATABLE:
            for _ in range(5):
                if chosen not in used:
                    break
                chosen = rng.choice(options)
            used.add(chosen)
        text = _expand(chosen, rng, used)
        texts.append(("an " if AN.match(text) else "a ") + text if part.article else text)
    return "".join(texts)


def _size(parts: Parts) -> int:
    """The number of texts that the parts can expand to, including repetitions."""
    return prod(_slot_size(part.key, part.form) for part in parts if isinstance(part, Slot))


@cache
def _slot_size(key: str, form: str) -> int:
    return sum(_size(parts) for parts in _options(key, form))


class Template(NamedTuple):
    kind: str  # its last character, a key of OPENERS
    parts: Parts
    weight: float
    opener_share: float


def _template(line: str) -> Template:
    parts = _parts(line[:-1])
    size = _size(parts)
    share = OPENER_SHARE if size >= ENOUGH else SHORT_OPENER_SHARE
    if line.startswith(("{name},", "hello ")) or ", {name}" in line:  # it already addresses somebody
        share = 0.0
    return Template(line[-1], parts, min(1, size / ENOUGH) ** 0.5, share)


_CUMULATIVE = list(accumulate(int(key.rsplit(" ", 1)[1]) for key in SENTENCES))
_TEMPLATES = [[_template(line) for line in _lines(text)] for text in SENTENCES.values()]
_TEMPLATE_CUMULATIVE = [list(accumulate(template.weight for template in domain)) for domain in _TEMPLATES]
_OPENERS = {kind: [_parts(entry) for entry in _entries(text, "/")] for kind, text in OPENERS.items()}


def _draw(rng: random.Random) -> str:
    """A random sentence of any length, for training or held out."""
    domain = rng.choices(range(len(_TEMPLATES)), cum_weights=_CUMULATIVE)[0]
    template = rng.choices(_TEMPLATES[domain], cum_weights=_TEMPLATE_CUMULATIVE[domain])[0]
    used: set[Parts] = set()
    text = _expand(template.parts, rng, used)
    if rng.random() < template.opener_share:
        opener = _expand(rng.choice(_OPENERS[template.kind]), rng, used)
        if opener.endswith(",") or not text.startswith(("I ", "I'", "that", "next")):
            text = f"{opener} {text}"
    return text[0].upper() + text[1:] + ("?" if template.kind == "?" else ".")


def words(text: str) -> list[str]:
    """The words of a sentence in lower case, with apostrophes."""
    return re.findall(r"[a-z']+", text.lower())


def is_held_out(text: str) -> bool:
    """Whether training never uses the sentence (one in forty). Case and punctuation are ignored."""
    return zlib.crc32(" ".join(words(text)).encode()) % HELD_OUT_SHARE == 0


def sentence(rng: random.Random, held_out: bool = False) -> str:
    """One random sentence for training, or one that is held out for the benchmark (forty times slower)."""
    while True:
        text = _draw(rng)
        if text.count(" ") < MAX_WORDS and is_held_out(text) == held_out:
            return text


def passage(rng: random.Random, n_sentences: int, held_out: bool = False) -> list[str]:
    """Sentences of one clip. They have no common topic."""
    return [sentence(rng, held_out) for _ in range(n_sentences)]


def vocabulary() -> list[str]:
    """All words that sentences can have, in alphabetical order."""
    found = {"a", "an"}
    seen: set[Slot] = set()
    pending = [template.parts for domain in _TEMPLATES for template in domain]
    pending += [parts for openers in _OPENERS.values() for parts in openers]
    while pending:
        for part in pending.pop():
            if isinstance(part, str):
                found.update(words(part))
            elif part not in seen:
                seen.add(part)
                pending += _options(part.key, part.form)
    return sorted(found)


def _print_stats(sentences: list[str], seconds: float) -> None:
    lengths = [len(words(text)) for text in sentences]
    counts = Counter(word for text in sentences for word in words(text))
    for word in vocabulary():
        counts.setdefault(word, 0)
    rare = sorted(counts.items(), key=lambda item: item[1])
    print(f"sentences        {len(sentences)}, {len(set(sentences)) / len(sentences):.2%} distinct")
    print(f"rate             {len(sentences) / seconds:.0f} a second")
    mean = sum(lengths) / len(lengths)
    print(f"words            {min(lengths)} to {max(lengths)} a sentence, mean {mean:.2f}")
    print(f"distinct words   {len(counts)}")
    print(f"rarest           {', '.join(f'{word} {count}' for word, count in rare[:8])}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Print generated sentences, or statistics of them.")
    parser.add_argument("count", type=int, nargs="?", default=20, help="number of sentences (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generator (default 0)")
    parser.add_argument("--held-out", action="store_true", help="sentences that are held out for the benchmark")
    parser.add_argument("--stats", action="store_true", help="print statistics in place of the sentences")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    started = time.perf_counter()
    sentences = passage(rng, arguments.count, arguments.held_out)
    if arguments.stats:
        _print_stats(sentences, time.perf_counter() - started)
    else:
        print("\n".join(sentences))


if __name__ == "__main__":
    main()
